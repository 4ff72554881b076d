"""Drawing tokens for many rows at once, as `ridgeline.decoding.sampling` draws one.

Nothing here waits for the device, so that a recorded step can sample. Shapes: N rows, V tokens.
"""

import torch

from ridgeline.core.philox import NoiseStream
from ridgeline.executors.cuda.kernels import Draw
from ridgeline.executors.cuda.noise import gumbel, philox_rounds
from ridgeline.executors.cuda.slots import Settings
from ridgeline.kernels.triton import IN_PROMPT, AdjustmentTables

NONE_POSSIBLE = -1
_NEVER = float("-inf")
_MASK = 0xFFFFFFFF


def draw(
    logits_NV: torch.Tensor, of_rows: Settings, positions_N: torch.Tensor, how: Draw
) -> torch.Tensor:
    """A token for each row, at ``positions_N``, by its settings, int64; −1 where none is possible.

    Computed in float64, as the reference does, where there is noise; ``how`` is the most that a row
    asks for.
    """
    if how is Draw.BEST:
        top = logits_NV.max(dim=-1)
        return torch.where(top.values > _NEVER, top.indices, NONE_POSSIBLE)
    logits = logits_NV.double()
    best = logits.max(dim=-1, keepdim=True).values
    temperature = of_rows.fractions[0]
    greedy = temperature == 0
    scaled = (logits - best) / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel(_words(scaled.shape[1], of_rows, positions_N))
    kept = _truncated(scaled, of_rows) if how is Draw.TRUNCATED else scaled
    drawn = (kept + noise).argmax(dim=-1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    possible = (best[:, 0] > _NEVER) & (greedy | (best[:, 0] < float("inf")))
    return torch.where(possible, tokens, NONE_POSSIBLE)


def adjusted(
    logits_NV: torch.Tensor,
    tables: AdjustmentTables,
    slots_N: torch.Tensor,
    tokens_N: torch.Tensor,
    stops_N: torch.Tensor,
) -> torch.Tensor:
    """See `ridgeline.executors.cuda.kernels.Kernels.adjust`; in float64, as the reference."""
    vocab = tables.history.shape[1]
    counted = tables.counted.index_select(0, slots_N)
    is_next = counted == stops_N - 1
    tables.history.view(-1).index_add_(0, slots_N * vocab + tokens_N, is_next.int())
    tables.counted.index_copy_(0, slots_N, torch.where(is_next, stops_N, counted))

    ids, values, until = (
        table.index_select(0, slots_N)
        for table in (tables.edit_ids, tables.edit_values, tables.edit_until)
    )
    numbers = torch.arange(ids.shape[1], device=ids.device)
    is_edit = numbers < tables.num_edits.index_select(0, slots_N)[:, None]
    ids = torch.where(is_edit, ids, 0).long()
    is_barred = is_edit & (stops_N[:, None] < until)
    x = logits_NV.double().scatter_add(1, ids, torch.where(is_edit, values, 0.0))
    most = torch.where(is_barred, _NEVER, float("inf")).double()
    x = x.scatter_reduce(1, ids, most, "amin")

    repetition, frequency, presence = tables.penalties.index_select(1, slots_N)[..., None].unbind()
    seen = torch.where(counted[:, None] >= 0, tables.history.index_select(0, slots_N), 0)
    count = seen % IN_PROMPT
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency.float() * count - presence.float() * (count > 0)
    return x if logits_NV.dtype == torch.float64 else x.float()


def _truncated(scaled: torch.Tensor, settings: Settings) -> torch.Tensor:
    """−inf for what top-k, then top-p, then min-p drop; the best of each row is 0, and stays."""
    vocab = scaled.shape[1]
    _, top_p, min_p = settings.fractions[..., None].unbind()
    top_k = settings.counts[0].long()
    order = scaled.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    least = order.values.gather(1, (k - 1)[:, None])
    in_order = order.values.masked_fill(order.values < least, _NEVER)
    probabilities = in_order.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    in_order = in_order.masked_fill((before >= top_p) & (top_p < 1), _NEVER)
    in_order = in_order.masked_fill(in_order < min_p.log(), _NEVER)
    return torch.empty_like(scaled).scatter(1, order.indices, in_order)


def _words(vocab: int, settings: Settings, positions_N: torch.Tensor) -> torch.Tensor:
    """The random word of each token of each row, int64 ``[N, V]``."""
    blocks = torch.arange((vocab + 3) // 4, device=positions_N.device)[None]
    shape = (len(positions_N), blocks.shape[1])
    counter = (
        blocks.expand(shape),
        positions_N.long()[:, None].expand(shape),
        settings.counts[1].long()[:, None].expand(shape),
        torch.full_like(blocks, int(NoiseStream.SAMPLE)).expand(shape),
    )
    seeds = settings.seeds[:, None]
    words = philox_rounds(counter, (seeds & _MASK, seeds >> 32 & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab]
