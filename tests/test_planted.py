from tests.planted import BUGS, misfit


def test_planted_bugs_fit_the_sources_and_have_unique_names() -> None:
    assert list(filter(None, map(misfit, BUGS))) == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)
