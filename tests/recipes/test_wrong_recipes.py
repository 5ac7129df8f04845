"""Every way to get a recipe wrong is one line that names key, value, rule and remedy; following the
remedy helps.
"""

from __future__ import annotations

import re
import shutil
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import save_file

import recipes
from recipes.cli import main
from recipes.config import Recipe, loading
from recipes.config.loading import find_recipe, load, recipe_text
from recipes.setup.models import describe_random_model, toy_tokenizer
from recipes.setup.preparation import prepare
from recipes.tasks import TOY_WORDS
from tests.helpers.recipes.wrong import (
    CONTRADICTIONS,
    IDLE,
    OF_THE_COMMAND,
    OUT_OF_RANGE,
    RANGES,
    WITHOUT_RANGE,
    Range,
    Wrong,
    wrong,
)

KEYS = loading.leaves()
WRONG_TYPE = {
    int: "abc",
    float: "fast",
    bool: "perhaps",
    str: "{a: 1}",
    list[int]: "7",
    list[str]: "word",
}
ASSIGNMENT = re.compile(r"([a-z_]\w*(?:\.\w+)*)=(\S*[^\s,;)])")
Way = list[tuple[str, str]]
"""(key, value) to set, ("drop", key)."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory, without a tensor in its file."""
    folder = tmp_path_factory.mktemp("model")
    describe_random_model(load("tiny").model.config, toy_tokenizer(TOY_WORDS), folder)
    save_file({}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run that must not begin, on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return tmp_path / "run"


def outcome(base: str, overrides: list[str], folder: Path | None) -> str | None:
    """The one line about this recipe, or None.

    folder: where it is prepared, too; None: it is loaded only.
    """
    try:
        recipe = load(base, overrides)
        if folder is not None and base == "tiny":  # whose model is here
            prepare(recipe, folder)
    except recipes.RecipeError as error:
        assert len(str(error).splitlines()) == 1
        return str(error)
    return None


def refused(case: Wrong, folder: Path | None = None) -> str:
    """The one line, which has the words."""
    line = outcome(case.base, case.overrides, folder)
    assert line is not None, case
    assert all(word in line for word in case.words), (case, line)
    return line


def remedies(line: str) -> list[Way]:
    """What each way out that the line names sets and drops: 'set a=1 b=2, or drop c' has two."""
    _, _, text = line.rpartition("; ")
    ways = []
    for way in re.split(r",? or ", text.removeprefix("set ")):
        found = [("drop", key) for key in re.findall(r"^drop (\S+)$", way)] or ASSIGNMENT.findall(
            way
        )
        ways.append([(key, value) for key, value in found if not value.isupper()])
    return [way for way in ways if way]


def follow(overrides: list[str], way: Way) -> list[str]:
    """The overrides after one way out, which takes the place of what they said of its keys."""
    new = {value if key == "drop" else key for key, value in way}
    kept = [
        each for each in overrides if not any(related(each.partition("=")[0], key) for key in new)
    ]
    return [*kept, *(f"{key}={value}" for key, value in way if key != "drop")]


def related(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def check_remedies(case: Wrong, line: str, folder: Path | None = None) -> None:
    """Each way makes the error go away, and one of them leads to a good recipe, maybe by the next
    error's.
    """
    ways = [follow(case.overrides, way) for way in remedies(line)]
    assert ways, line
    for overrides in ways:
        left = outcome(case.base, overrides, folder)
        assert left is None or left.rpartition("; ")[0] != line.rpartition("; ")[0], (
            overrides,
            left,
        )
        if left is None:
            return
    assert any(settles(case.base, overrides, folder) for overrides in ways)


def settles(base: str, overrides: list[str], folder: Path | None, rounds: int = 3) -> bool:
    line = outcome(base, overrides, folder)
    if line is None or rounds == 0:
        return line is None
    return any(settles(base, follow(overrides, way), folder, rounds - 1) for way in remedies(line))


def test_every_key_has_its_range_or_none() -> None:
    """A new key fails here until it is in wrong.py."""
    named = [*OUT_OF_RANGE, *WITHOUT_RANGE, *(key for each in RANGES for key in each.keys.split())]
    assert sorted(named) == sorted(KEYS)
    for key in KEYS:
        assert loading.remedy_of(key).startswith(f"set {key}")


@pytest.mark.parametrize("each", RANGES, ids=lambda each: each.rule)
def test_out_of_a_range(each: Range) -> None:
    for key in each.keys.split():
        for value in each.outside:
            case = wrong(f"{key}={value}", f"command line: {key}={value}: {each.rule}")
            line = refused(case)
        check_remedies(case, line)


def test_the_ends_of_the_ranges_are_inside(tmp_path: Path) -> None:
    """In a file, where keys without effect do no harm."""
    ends = [f"{key}={each.end}" for each in RANGES for key in each.keys.split()]
    tiny, file = OmegaConf.load(find_recipe("tiny")), tmp_path / "ends.yaml"
    OmegaConf.save(OmegaConf.merge(tiny, OmegaConf.from_dotlist(ends)), file)
    for algorithm in ("grpo", "ppo"):
        words = ["model.path=x", "task.name=chain_sum", f"algorithm={algorithm}"]
        assert load(file, words).steps == 1


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_none_of_the_values_that_there_are(key: str) -> None:
    line = refused(OUT_OF_RANGE[key])
    assert f"{key}=" in line
    check_remedies(OUT_OF_RANGE[key], line)


@pytest.mark.parametrize("hint", dict.fromkeys(KEYS.values()), ids=str)
def test_a_wrong_type(hint: object) -> None:
    key = next(key for key in KEYS if KEYS[key] == hint)
    kinds = (
        [part for part in hint.__args__ if part is not type(None)]
        if isinstance(hint, types.UnionType)
        else [hint]
    )
    value = WRONG_TYPE.get(kinds[0], "word")
    shown = "{'a': 1}" if value == "{a: 1}" else value
    case = Wrong([f"{key}={value}"], [f"{key}={shown}: must be {loading.in_words(key)}; set {key}"])
    check_remedies(case, refused(case))


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: " ".join(case.overrides)[:60])
def test_a_contradiction(case: Wrong, folder: Path, model_dir: Path) -> None:
    there = [
        [text.replace("DIR", str(model_dir)) for text in texts]
        for texts in (case.overrides, case.words)
    ]
    case = Wrong(*there, case.base)
    # Preparing takes far longer than loading.
    where = None if outcome(case.base, case.overrides, None) else folder
    line = refused(case, where)
    assert not folder.exists()
    if case.overrides != ["model.path=/nowhere"]:  # which only the user can correct
        check_remedies(case, line, where)


@pytest.mark.parametrize(("section", "other"), IDLE.items())
def test_a_section_without_effect(section: str, other: str) -> None:
    for key in KEYS:
        if key.startswith(f"{section}."):
            setting = loading.remedy_of(key).removeprefix("set ")
            refused(Wrong([other, setting], [f"{setting}: has no effect with {other}"]))


@pytest.mark.parametrize("name", OF_THE_COMMAND)
def test_the_command_prints_the_line_and_exits_2(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = OF_THE_COMMAND[name]
    assert main(["run", case.base, *case.overrides, "--run-dir", str(folder)]) == 2
    seen = capsys.readouterr()
    assert seen.err.count("\n") == 1 and seen.out == ""
    assert all(word in seen.err for word in case.words), seen.err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("generation_config.json", "[]", "generation_config.json is no mapping"),
        ("tokenizer.json", None, "has no readable tokenizer: tokenizer.json is missing"),
        ("tokenizer.json", "{}", "has no readable tokenizer"),
        ("model.safetensors", "cut off", "model.safetensors cannot be read"),
        ("model.safetensors", None, "lacks model.safetensors"),
    ],
)
def test_a_damaged_model_directory_is_one_line_that_names_the_file_before_anything_starts(
    name: str,
    content: str | None,
    said: str,
    model_dir: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = folder.parent / "model"
    shutil.copytree(model_dir, model)
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content)
    assert main(["run", "tiny", f"model.path={model}", "--run-dir", str(folder)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"model.path={model}: " in line and said in line
    assert "download or save the model again" in line or "save_pretrained" in line
    assert not folder.exists()


def test_a_file_of_plain_text_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "text.yaml").write_text("just text\n")
    with pytest.raises(recipes.RecipeError, match=r"text.yaml: must be a mapping of keys"):
        load(tmp_path / "text.yaml")


def test_a_value_is_blamed_on_where_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(recipe_text(load("tiny")).replace("seed: 0", "seed: -1"))
    for words, where in (([], "mine.yaml: seed=-1"), (["seed=-2"], "command line: seed=-2")):
        with pytest.raises(recipes.RecipeError, match=f"^{where}: "):
            load(tmp_path / "mine.yaml", words)
    with pytest.raises(recipes.RecipeError, match="^command line: steps=abc: must be an integer"):
        load(tmp_path / "mine.yaml", ["seed=1", "steps=abc"])


def test_a_key_that_is_typed_as_an_option_is_told_how_to_be_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "tiny", "--steps", "3"])
    assert "unrecognized arguments: --steps; a key has no dashes: set steps=3" in (
        capsys.readouterr().err
    )


def test_every_packaged_recipe_is_listed_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == loading.packaged_recipes()
    assert all(len(line.split()) > 4 for line in lines)


JUNK = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\x0c", "a\x85b", "\u2028"]),  # ends of lines, too
    st.integers().map(str),
    st.sampled_from(
        [
            str(10**400),
            "1e999",
            "-.inf",
            ".nan",
            "???",
            "${steps}",
            "${seed}",
            "${oc.env:HOME}",
            "~",
            "''",
        ]
    ),
    st.sampled_from(
        [
            "[1, [2]]",
            "[${steps}]",
            "{a: {b: 1}}",
            "[null]",
            "{}",
            "[]",
            "2024-01-01",
            "0x10",
            "!!set {a}",
        ]
    ),
    st.floats().map(str),
    st.lists(
        st.one_of(st.integers(), st.sampled_from(["params", "critic", "q_proj", ""])), max_size=3
    ).map(str),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from([*KEYS, *Recipe.__dataclass_fields__]), JUNK),
        min_size=1,
        max_size=3,
    )
)
def test_junk_is_one_line_or_a_recipe(pairs: list[tuple[str, str]]) -> None:
    try:
        recipe = load("tiny", [f"{key}={value}" for key, value in pairs])
    except recipes.RecipeError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(recipe, Recipe)
