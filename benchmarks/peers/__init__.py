"""The same measurement on other engines, so that a comparison can be repeated by anyone."""
