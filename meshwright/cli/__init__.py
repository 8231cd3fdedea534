"""The command line: `meshwright` and `python -m meshwright`. One command a file; torch only where needed."""

from meshwright.cli.app import main

__all__ = ["main"]
