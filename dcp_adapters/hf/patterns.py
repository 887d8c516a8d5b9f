r"""Regular expressions from files of others, which must not take for ever.

Python's engine tries every way in which repeats can share a text. For a repeat inside of a repeat these grow
exponentially with the text; for `k` repeats beside each other they are the length of the text to the power of `k`.
Tools write neither; what they write looks like `.*mlp\.down_proj$`.
"""

import re

MOST_WAYS = 10**8  # some seconds
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!<]*|[()|*+]|\{\d*,?\d*\}|.", re.DOTALL)
REPEAT = re.compile(r"[*+]|\{\d*,?\d*\}")


def bounded(pattern: str, longest: int) -> re.Pattern[str]:
    """The compiled pattern.

    Args:
        pattern: a regular expression.
        longest: characters of the longest text that it is matched with.

    Raises:
        ValueError: matching could take for ever.
        re.error: it is no pattern.
    """
    compiled = re.compile(pattern)
    repeats, open_groups, closed = 0, [False], False  # whether each open group, and the one just closed, has choices
    for token in TOKEN.findall(pattern):
        if REPEAT.fullmatch(token):
            repeats += 1
            if closed:
                raise ValueError(f"{pattern[:200]!r} repeats what has repeats or choices, and could take for ever")
        closed = False
        if token.startswith("("):
            open_groups.append(False)
        elif token == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            open_groups[-1] |= closed
        elif token == "|" or REPEAT.fullmatch(token):
            open_groups[-1] = True
    if max(longest, 2) ** repeats > MOST_WAYS:
        raise ValueError(f"{pattern[:200]!r} repeats {repeats} times, which could take for ever in names like these")
    return compiled
