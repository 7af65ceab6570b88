"""The lab: the paper's experiments as software that trains."""


class ExplainedError(Exception):
    """An error whose message tells the user in one line what is wrong and what to do. Commands print it alone."""
