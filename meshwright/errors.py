"""What can go wrong in a way that a user can act on. Anything else that escapes is our bug."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: one line with the field, what was given, what is allowed and what to try.

    `exit_code` is what the command line ends with. `on_every_rank`: all ranks of a job raise it
    together, so one of them may speak for all.
    """

    exit_code = 2
    on_every_rank = False
