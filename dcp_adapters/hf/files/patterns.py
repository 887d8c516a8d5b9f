r"""Regular expressions from files of others, which must not take for ever.

Python's engine tries every way in which repeats can share a text. For a repeat inside of a repeat these grow
exponentially with the text; repeats beside each other multiply them by the length of the text each, choices by two.
Tools write few of them; what they write looks like `.*mlp\.down_proj$`.
"""

import re

MOST_WAYS = 10**8  # some seconds
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!<]*|[()|*+]|\{\d*,?\d*\}|.", re.DOTALL)
REPEAT = re.compile(r"[*+]|\{\d*,?\d*\}")


def bounded(pattern: str, longest: int) -> re.Pattern[str]:
    """Return the compiled pattern.

    Args:
        pattern: a regular expression.
        longest: characters of the longest text that it is matched with.

    Raises:
        ValueError: matching could take for ever.
        re.error: it is no pattern.
    """
    compiled = re.compile(pattern)
    ways, before = 1, ""
    open_groups, closed = [False], False  # whether each open group, and the one just closed, has choices
    for token in TOKEN.findall(pattern):
        repeats = REPEAT.fullmatch(token) is not None
        optional = token == "?" and before != "?" and not REPEAT.fullmatch(before)  # else it makes a repeat lazy
        # A repeat of a repeat is exponential in the text, so no bound on its length helps.
        if repeats and closed:
            raise ValueError(f"{pattern[:200]!r} repeats what has repeats or choices, and could take for ever")
        if repeats:
            # It may end at any character of the text.
            ways *= max(longest, 2)
        elif optional or token == "|":
            ways *= 2
        closed, before = False, token
        if token.startswith("("):
            open_groups.append(False)
        elif token == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            open_groups[-1] |= closed
        elif repeats or optional or token == "|":
            open_groups[-1] = True
    if ways > MOST_WAYS:
        raise ValueError(f"{pattern[:200]!r} can fit in {ways:.0e} ways, which could take for ever in names like these")
    return compiled
