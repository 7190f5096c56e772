"""What tests of the command line share."""

import sys

import pytest
from own_files import OWN, TINY, write

from namm.cli import main


@pytest.fixture(autouse=True, scope="module")
def _coarse_pictures(coarse_pictures):
    with coarse_pictures():
        yield


@pytest.fixture
def namm(capsys):
    """Call the command line: exit code, and what was said."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture(scope="session")
def own_run(tmp_path_factory, coarse_pictures):
    """A user's folder with a run of all stages in runs/own; to be read, or copied."""
    folder = write(tmp_path_factory.mktemp("own") / "work")
    with pytest.MonkeyPatch.context() as patch, coarse_pictures():
        patch.chdir(folder)
        sys.modules.pop("charges", None)
        assert main(["run", *OWN, *TINY]) == 0
    return folder
