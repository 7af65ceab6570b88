"""The lab: the paper's experiments as software that trains."""
