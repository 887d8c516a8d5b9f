"""Which linears of a layout a quantized weight becomes, a weight of all experts too; any other weight is refused.

Most layouts have a linear for each expert of a weight [E, N, K]. In that of gpt-oss it stays whole, and its rows of
gate and up alternate. The weight does not show that, but biases beside it do: experts of other layouts have none.
"""

from collections.abc import Collection, Mapping

from dcp_adapters.hf.files.engine_names import Piece, pieces_of, turned_pieces, whole_experts
from dcp_adapters.hf.layouts.layout import Layout
from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry


def engine_pieces(name: str, record: Entry, layout: Layout) -> list[Piece]:
    """Return the linears that a quantized weight consists of. Raises ValueError if the layout has no such weight."""
    pieces, who = pieces_of(name, record.shape), "engines"
    known = "<module>.weight [N, K] and <module>.experts.<name> [E, N, K]"
    if layout.experts == "all":
        pieces, who = whole_experts(name, record.shape), f"engines that read the layout {layout.name}"
        known = "<module>.experts.gate_up_proj and down_proj [E, N, K]"
    if pieces is None:
        raise ValueError(
            f"{name} {record.shape} is quantized, and {who} know no such linear: they know {known}; convert it to a "
            "dense one (python -m dcp_adapters convert --to bfloat16 --include ...)"
        )
    return pieces


def dense_pieces(
    name: str, record: Entry, *, turned: bool, whole: Collection[str], asks: Collection[str]
) -> list[Piece] | None:
    """Return the linears that a dense weight of all experts is written as; None for one that stays as it is.

    Args:
        name: of the weight, or of any other dense tensor.
        record: it.
        turned: whether models multiply by it as it is, [E, K, N]. Files have such a weight whole, but for engines that
            build a linear for each expert.
        whole: what the model's files have whole.
        asks: names of what an engine builds to read the files, as far as known.
    """
    if len(record.shape) != 3 or (name in whole and not turned):
        return None
    if turned:
        pieces = turned_pieces(name, record.shape)
        # Only if the engine asks for every one of them; it would not look for others.
        return pieces if pieces and all(f"{piece.module}.weight" in asks for piece in pieces) else None
    return pieces_of(name, record.shape)


def dense_weight(piece: Piece, record: Entry) -> tuple[str, tuple[int, ...]]:
    """Return name and shape that a linear has as a dense one; experts that are stored whole are transposed then."""
    if piece.expert is None and len(record.shape) == 3:
        return piece.module, (record.shape[0], record.shape[2], record.shape[1])
    return f"{piece.module}.weight".lstrip("."), (piece.rows[1] - piece.rows[0], record.shape[-1])


def check_experts(records: Mapping[str, Entry], turned: Collection[str], layout: Layout) -> None:
    """Refuse weights of all experts whose meaning the layout would change."""
    experts = [name for name, record in records.items() if len(record.shape) == 3 and pieces_of(name, record.shape)]
    if layout.experts == "all":
        dense = [name for name in experts if records[name].recipe is None and name not in turned]
        if dense:
            raise ValueError(
                f"{few_of(dense)}: rows of linears [E, N, K] that are not quantized, and dense experts of the layout "
                f"{layout.name} are [E, K, N]; quantize them, or transpose them"
            )
        return
    biased = [name for name in experts if records[name].recipe is not None and f"{name}_bias" in records]
    if biased:
        raise ValueError(
            f"{few_of(biased)}: with biases beside them, these are experts as gpt-oss has them, whose rows of gate and "
            f'up alternate, and the layout {layout.name} would take them for two halves; use layout="mxfp4"'
        )
