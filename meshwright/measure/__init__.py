"""Measurements on real ranks, written as a `Profile` of samples."""
