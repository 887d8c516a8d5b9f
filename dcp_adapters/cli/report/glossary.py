"""What the words of the page mean, at its end."""

from dcp_adapters.cli.report.channels import FACTOR
from dcp_adapters.cli.report.markup import Markup, tag

WORDS = {
    "SNR": "10 log10 of the sum of squares of the right values over that of the errors, in dB, over elements that are "
    "finite on both sides. It compares weights: it says how well they are kept and not how good a model is.",
    "scale": "What the elements of a block, a row or a tensor are multiplied by. Block scales are counted as they are "
    "stored, without the global scale.",
    "outlier channel": f"A row or column with a largest magnitude of over {FACTOR:g}\u00d7 the median of those of its "
    "tensor (channels of zeros aside; of an even number the lower of the two in the middle). Dims before the last are "
    "rows.",
    "saturated": "Elements with the largest magnitude of their type (448 in E4M3, 57344 in E5M2, 6 in E2M1), less one "
    "for each scale that has any.",
    "clipped": "Elements whose right value is beyond the largest one under their scale by more than half a step.",
    "zero scale": "Of an E4M3 block scale: every element of the block is 0.",
}


def glossary() -> Markup:
    """A list that opens."""
    items = [tag(kind, part) for word, meaning in WORDS.items() for kind, part in (("dt", word), ("dd", meaning))]
    return tag("section", tag("details", tag("summary", "What the words mean"), tag("dl", *items)))
