"""What tests of the command line share."""

import pytest

from namm.cli import main


@pytest.fixture
def namm(capsys):
    """Call the command line: exit code, and what was said."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call
