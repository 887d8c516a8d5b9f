"""The error of a delta, or of a coded chunk, that is not what was written."""


def damaged(what: str, why: str) -> ValueError:
    """Make the error; `what` names the delta, or the part of it that is at fault."""
    return ValueError(f"{what} is damaged: {why}; get it again")
