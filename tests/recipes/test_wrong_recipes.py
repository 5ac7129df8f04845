"""Every way to get a recipe wrong is one line that names key, value, rule and remedy; following the remedy helps."""

import re
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recipes
from recipes.cli import main
from recipes.config import Recipe, schema
from recipes.loading import load
from recipes.models import describe_random_model, toy_tokenizer
from recipes.preparation import prepare
from recipes.tasks import TOY_WORDS
from tests.recipes.wrong_recipes import (
    CONTRADICTING,
    CONTRADICTING_NOTHING,
    MORE_CONTRADICTIONS,
    OF_THE_FORM,
    OF_THE_MODEL,
    OUT_OF_RANGE,
    WITHOUT_RANGE,
    Wrong,
)

KEYS = schema.leaves()
WRONG_TYPE = {int: "abc", float: "fast", bool: "perhaps", str: "{a: 1}", list[int]: "7", list[str]: "word"}
ASSIGNMENT = re.compile(r"([a-z_]\w*(?:\.\w+)*)=(\S*[^\s,;)])")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model's directory, without weights."""
    folder = tmp_path_factory.mktemp("model")
    describe_random_model(load("tiny").model.config, toy_tokenizer(TOY_WORDS), folder)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of a run that must not begin, on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return tmp_path / "run"


def wrong_type(key):
    hint = KEYS[key]
    kinds = [part for part in hint.__args__ if part is not type(None)] if isinstance(hint, types.UnionType) else [hint]
    return WRONG_TYPE.get(kinds[0], "word")


def outcome(base, overrides, folder):
    """The one line about this recipe, or None. folder: where it is prepared, too; None: it is loaded only."""
    try:
        recipe = load(base, overrides)
        if folder is not None and base == "tiny":  # whose model is here
            prepare(recipe, folder)
    except recipes.RecipeError as error:
        assert len(str(error).splitlines()) == 1
        return str(error)
    return None


def refused(wrong, folder=None):
    """The one line, which has the words."""
    line = outcome(wrong.base, wrong.overrides, folder)
    assert line is not None
    for word in wrong.words:
        assert word in line, line
    return line


def remedies(line):
    """What each way out that the line names sets and drops: 'set a=1 b=2, or drop c' has two."""
    _, _, text = line.rpartition("; ")
    ways = []
    for way in re.split(r",? or ", text.removeprefix("set ")):
        found = [("drop", key) for key in re.findall(r"^drop (\S+)$", way)] or ASSIGNMENT.findall(way)
        ways.append([(key, value) for key, value in found if not value.isupper()])
    return [way for way in ways if way]


def follow(overrides, way):
    """The overrides after one way out, which takes the place of what they said of its keys."""
    new = {value if key == "drop" else key for key, value in way}
    kept = [each for each in overrides if not any(related(each.partition("=")[0], key) for key in new)]
    return [*kept, *(f"{key}={value}" for key, value in way if key != "drop")]


def check_remedies(wrong, line, folder=None):
    """Each way makes the error go away, and one of them leads to a good recipe, maybe by the next error's."""
    ways = [follow(wrong.overrides, way) for way in remedies(line)]
    assert ways, line
    for overrides in ways:
        left = outcome(wrong.base, overrides, folder)
        assert left is None or rule_of(left) != rule_of(line), (overrides, left)
    assert any(settles(wrong.base, overrides, folder) for overrides in ways)


def rule_of(line):
    return line.rpartition("; ")[0]


def settles(base, overrides, folder, rounds=3):
    line = outcome(base, overrides, folder)
    if line is None or rounds == 0:
        return line is None
    return any(settles(base, follow(overrides, way), folder, rounds - 1) for way in remedies(line))


def related(one, other):
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def test_every_key_has_its_cases():
    """A new key fails here until it is in wrong_recipes.py."""
    assert set(OUT_OF_RANGE) | WITHOUT_RANGE == set(KEYS)
    assert not set(OUT_OF_RANGE) & WITHOUT_RANGE
    assert set(CONTRADICTING) | CONTRADICTING_NOTHING == set(KEYS)
    assert not set(CONTRADICTING) & CONTRADICTING_NOTHING


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_type(key):
    shown = "{'a': 1}" if wrong_type(key) == "{a: 1}" else wrong_type(key)
    wrong = Wrong([f"{key}={wrong_type(key)}"], [f"{key}={shown}: must be {schema.in_words(key)}; set {key}"])
    check_remedies(wrong, refused(wrong))


def test_a_misspelt_key():
    for key in KEYS:
        wrong = key[:-1] + "_" + key[-1]
        refused(Wrong([f"{wrong}=1"], [f"command line: {wrong}: unknown key; did you mean {key}?"]))


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_out_of_range(key):
    line = refused(OUT_OF_RANGE[key])
    assert f"{key}=" in line
    check_remedies(OUT_OF_RANGE[key], line)


@pytest.mark.parametrize("name", CONTRADICTING | MORE_CONTRADICTIONS)
def test_a_contradiction(name, folder, model_dir):
    overrides, words, base = (CONTRADICTING | MORE_CONTRADICTIONS)[name]
    there = [[text.replace("DIR", str(model_dir)) for text in texts] for texts in (overrides, words)]
    wrong = Wrong(*there, base)
    where = None if outcome(wrong.base, wrong.overrides, None) else folder  # preparing takes far longer than loading
    line = refused(wrong, where)
    assert not folder.exists()
    if name != "model.path":  # which only the user can correct
        check_remedies(wrong, line, where)


@pytest.mark.parametrize("name", OF_THE_FORM | OF_THE_MODEL)
def test_the_command_prints_the_line_and_exits_2(name, folder, capsys):
    wrong = (OF_THE_FORM | OF_THE_MODEL)[name]
    status = main(["run", wrong.base, *wrong.overrides, "--run-dir", str(folder)])
    message = capsys.readouterr().err
    assert status == 2
    assert message.count("\n") == 1, message
    for word in wrong.words:
        assert word in message
    assert not folder.exists()


JUNK = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\x0c", "a\x85b", "\u2028"]),  # ends of lines, too
    st.integers().map(str),
    st.sampled_from(
        [str(10**400), "1e999", "-.inf", ".nan", "???", "${steps}", "${seed}", "${oc.env:HOME}", "~", "''"]
    ),
    st.sampled_from(["[1, [2]]", "[${steps}]", "{a: {b: 1}}", "[null]", "{}", "[]", "2024-01-01", "0x10", "!!set {a}"]),
    st.floats().map(str),
    st.lists(st.one_of(st.integers(), st.sampled_from(["params", "critic", "q_proj", ""])), max_size=3).map(str),
)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([*KEYS, *Recipe.__dataclass_fields__]), JUNK), min_size=1, max_size=3))
def test_junk_is_one_line_or_a_recipe(pairs):
    try:
        recipe = load("tiny", [f"{key}={value}" for key, value in pairs])
    except recipes.RecipeError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(recipe, Recipe)
