"""What a transformers batch says of documents and targets, as one whole batch without padding, before it is cut.

Padding is left out, not masked: rows of different length become one row of documents, so that no rank computes on
padding and attention needs lengths alone. All functions are local and see the batch as every rank holds it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.layout import document_lengths

IGNORE = -100
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What transformers' collators say of packed documents; replaced by lengths."""

Rows = list[list[tuple[int, int]]]
"""For each row of a batch the documents in it, as ranges of its columns."""


class Whole(NamedTuple):
    """A batch without padding.

    Attributes:
        batch: tensors (B, S, ...) and what is no tensor.
        lengths: of the documents that every row holds, in order.
        most: the largest position that was in the batch, where positions were given; otherwise its length minus 1.
    """

    batch: dict[str, Any]
    lengths: tuple[int, ...]
    most: int


def lay_out(batch: Mapping[str, Any], *, causal: bool, documents: Any = None) -> Whole:
    """The whole batch, with targets in place, its documents known and its padding left out.

    Args:
        batch: "input_ids" or "inputs_embeds", (B, S, ...), and optionally "attention_mask" (B, S) of zeros and ones,
            "position_ids" (1 or B, S), "labels" or "shift_labels" (B, S), "cu_seq_lens_q" and its like, other tensors
            (B, S, ...), and values that are no tensors.
        causal: labels are the tokens themselves and are shifted as transformers shifts them; documents are seen from
            positions that start anew, as transformers sees them in training without a cache.
        documents: lengths of the documents in every row, or their running sums; their last tokens have no target.

    Returns:
        The batch with "position_ids", and with "labels" and "shift_labels" for a causal model that has targets.

    Raises:
        ValueError: names what does not fit: shapes, masks with holes or of other values, targets at padding.
    """
    batch = dict(batch)
    rows, columns = _extent(batch)
    _shift(batch, causal)
    given = batch.get("position_ids")
    ranges = _documents(batch, rows, columns, documents, causal)
    device = next(x.device for x in batch.values() if isinstance(x, Tensor))
    if given is None:
        batch["position_ids"] = torch.arange(columns, device=device)[None]
    most = columns - 1 if given is None or not given.numel() else int(given.max())
    if documents is not None and "shift_labels" in batch:
        ends = torch.tensor([end - 1 for _, end in ranges[0]], device=device)
        batch["shift_labels"] = batch["labels"] = batch["shift_labels"].index_fill(1, ends, IGNORE)
    full = all(_covers(row, columns) for row in ranges)
    if not full or any(row != ranges[0] for row in ranges):
        batch = _packed(batch, ranges, rows, columns)
        ranges = [[span for row in ranges for span in row]]
    return Whole(batch, tuple(end - begin for begin, end in ranges[0]), most)


def _extent(batch: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of a batch whose tensors all have them."""
    names = [name for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)]
    if len(names) != 1:
        raise ValueError(f"the batch must hold one of 'input_ids' and 'inputs_embeds', got {', '.join(batch)}")
    rows, columns = batch[names[0]].shape[:2]
    for name, x in batch.items():
        if not isinstance(x, Tensor) or name in (*PACKING, "num_items_in_batch"):
            continue
        fits = x.ndim >= 2 and x.shape[1] == columns and (x.shape[0] == rows or name == "position_ids")
        if not fits or (name == "attention_mask" and x.ndim != 2):
            raise ValueError(
                f"{name!r} has shape {tuple(x.shape)}, but only tensors of shape ({rows}, {columns}, ...) as "
                f"{names[0]!r} has can be cut along the sequence (attention_mask: of two dimensions)"
            )
    return rows, columns


def _shift(batch: dict[str, Any], causal: bool) -> None:
    """Put the targets of a causal model where their predictions are, before any cut."""
    if "shift_labels" in batch and not causal:
        raise ValueError("'shift_labels' is for causal models; a masked language model takes 'labels'")
    if not causal:
        return
    if "labels" in batch and "shift_labels" not in batch:
        batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:].contiguous()
    if "shift_labels" in batch:
        batch["labels"] = batch["shift_labels"]  # transformers computes no loss without labels


def _documents(batch: dict[str, Any], rows: int, columns: int, documents: Any, causal: bool) -> Rows:
    """The documents of each row, from whichever argument tells; takes what it used out of the batch."""
    mask = batch.pop("attention_mask", None)
    packing = {name: batch.pop(name) for name in PACKING if batch.get(name) is not None}
    padded = mask is not None and not bool((mask == 1).all())
    if "cu_seq_lens_k" in packing and not torch.equal(packing["cu_seq_lens_q"], packing["cu_seq_lens_k"]):
        raise ValueError("'cu_seq_lens_q' and 'cu_seq_lens_k' differ: keys of other lengths than queries")
    if "cu_seq_lens_q" in packing:
        if documents is not None or rows != 1:
            raise ValueError(f"'cu_seq_lens_q' goes with one row and without documents=, got {rows} rows")
        documents = packing["cu_seq_lens_q"].cpu()
    if documents is not None:
        if padded:
            raise ValueError("packed documents and an 'attention_mask' with zeros: leave the padding out")
        lengths = document_lengths(documents)
        if sum(lengths) != columns:
            raise ValueError(f"documents hold {sum(lengths)} tokens in all, but a row has {columns}")
        return [_ranges(lengths)] * rows
    if mask is not None:
        return [_run(mask[row], row) for row in range(rows)] if padded else [[(0, columns)]] * rows
    if causal and "position_ids" in batch:
        return [_restarts(row) for row in batch["position_ids"].expand(rows, columns)]
    return [[(0, columns)]] * rows


def _ranges(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def _run(mask: Tensor, row: int) -> list[tuple[int, int]]:
    """The one run of ones in a row of a padding mask; none for a row of zeros."""
    kept = mask.nonzero().flatten()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"'attention_mask' must hold zeros and ones, got {mask.unique().tolist()} in row {row}")
    if not len(kept):
        return []
    begin, end = int(kept[0]), int(kept[-1]) + 1
    if end - begin != len(kept):
        raise ValueError(
            f"'attention_mask' has a hole in row {row}: {len(kept)} ones between columns {begin} and {end}; padding "
            "may come before and after a row's tokens, not among them"
        )
    return [(begin, end)]


def _restarts(row: Tensor) -> list[tuple[int, int]]:
    """Documents start where the position is not one more than the position before."""
    starts = [0, *((row.diff() != 1).nonzero().flatten() + 1).tolist()] if len(row) else []
    return list(zip(starts, [*starts[1:], len(row)], strict=True))


def _covers(row: list[tuple[int, int]], columns: int) -> bool:
    return sum(end - begin for begin, end in row) == columns


def _packed(batch: dict[str, Any], ranges: Rows, rows: int, columns: int) -> dict[str, Any]:
    """All rows behind one another in one row, without padding."""
    spans = [row * columns + column for row, spans in enumerate(ranges) for span in spans for column in range(*span)]
    kept = torch.tensor(spans, dtype=torch.int64)
    packed = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor) and name != "num_items_in_batch":
            flat = x.expand(rows, *x.shape[1:]).flatten(0, 1)
            packed[name] = flat[kept.to(x.device)][None]
    for name in ("labels", "shift_labels"):
        if name in batch and int((batch[name] != IGNORE).sum()) != int((packed[name] != IGNORE).sum()):
            raise ValueError(
                f"targets at padding: set labels to {IGNORE} at padding, and at the first token of a row that is "
                "padded on the left, which would be predicted from padding"
            )
    return packed
