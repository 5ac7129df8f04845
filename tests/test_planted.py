from tests.planted import BUGS, misfit


def test_every_planted_bug_has_its_text_its_tests_and_a_name_of_its_own() -> None:
    assert list(filter(None, map(misfit, BUGS))) == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)
