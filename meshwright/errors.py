"""What can go wrong in a way that a user can act on. Anything else that escapes is our bug."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: one line with the field, what was given, what is allowed and what to try."""
