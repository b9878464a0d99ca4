"""Rules of methods that expect future queries, as loops in double precision."""

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from tests.support.engine import D
from tests.support.plain_cache import BASE, GROUP, HEADS, Moment
from tests.support.plain_rules import Scorer, Scores, is_first, project, raise_to_top


def rotate_mean(at: Moment, future: int) -> Tensor:
    """Matrix [D, D] that rotates a query (even channels, then odd ones) to the mean over the positions to come."""
    if at.rotation is None:
        return torch.eye(D).double()
    end = min(at.spec.segments[-1].end, at.segment.end + future)
    if not at.segment.causal:
        end = at.spec.segments[at.segment.index + 1].end
    factor = at.rotation[at.segment.end : end].mean(0).to(torch.complex128)
    real, imaginary = torch.diag(factor.real), torch.diag(factor.imag)
    return torch.cat((torch.cat((real, -imaginary), 1), torch.cat((imaginary, real), 1)))


def order_channels(at: Moment, keys: Tensor) -> Tensor:
    """Keys [slots, D] with even channels first, then odd ones, where they are rotated."""
    return keys if at.rotation is None else torch.cat((keys[:, ::2], keys[:, 1::2]), 1)


def expected_attention(
    leading: int, future: int, epsilon: float, norm: str, queries: int | None = None
) -> Scorer:
    """Attention of Gaussian queries like the segment's at the next positions, times a norm."""

    def score(at: Moment) -> Scores:
        skipped = leading if at.segment.index == 0 and at.segment.causal else 0
        asked = at.asking[skipped:]
        asked = asked[-(queries or len(asked)) :]
        turn = rotate_mean(at, future)
        found = []
        for number, head in enumerate(at.heads):
            keys = order_channels(at, head.keys)
            sums = torch.zeros(len(keys)).double()
            firsts = torch.tensor(is_first(at, head, leading))
            for one in at.queries[number]:
                raw = at.unrotate(one[-len(asked) :] * at.spec.logit_scale, asked)
                mean, centred = turn @ raw.mean(0), raw - raw.mean(0)
                spread = turn @ (centred.T @ centred / len(asked)) @ turn.T
                logits = torch.stack([key @ mean + key @ spread @ key / 2 for key in keys])
                if not firsts.all():
                    sums += logits.masked_fill(firsts, -torch.inf).softmax(0) / GROUP
            lengths = project(at, number, 2) if norm == "output" else head.values.norm(dim=1).tolist()
            products = [(a + epsilon) * length for a, length in zip(sums.tolist(), lengths, strict=True)]
            found.append(raise_to_top(products, firsts.tolist()))
        return found

    return score


def capkv(leading: int, future: int, tau: float) -> Scorer:
    """Leverage of values under weights by the cosine of keys and the mean query at the next positions."""

    def score(at: Moment) -> Scores:
        asked = at.asking[leading if at.segment.index == 0 and at.segment.causal else 0 :]
        turn = rotate_mean(at, future)
        found = []
        for number, head in enumerate(at.heads):
            keys = order_channels(at, head.keys)
            firsts = is_first(at, head, leading)
            own = [i for i, first in enumerate(firsts) if not first]
            sums = torch.zeros(len(keys)).double()
            for one in at.queries[number] if own else ():
                anchor = turn @ at.unrotate(one[-len(asked) :], asked).mean(0)
                cosines = torch.stack([keys[i] @ anchor / keys[i].norm() / anchor.norm() for i in own])
                weights = (tau * (cosines - cosines.max())).exp()
                matrix = torch.eye(D).double()
                for i, weight in zip(own, weights, strict=True):
                    matrix += (weight + 1e-6) * torch.outer(head.values[i], head.values[i])
                inverse = torch.linalg.inv(matrix)
                for i, weight in zip(own, weights, strict=True):
                    sums[i] += weight * (head.values[i] @ inverse @ head.values[i]) / GROUP
            found.append(raise_to_top(sums.tolist(), firsts))
        return found

    return score


def calibrated_attention(tensors: Mapping[str, Tensor], epsilon: float) -> Scorer:
    """Attention of the next scale's calibrated queries, whose covariance is about each scale's own mean."""

    def score(at: Moment) -> Scores:
        lengths = torch.tensor([segment.length for segment in at.spec.segments]).double()
        weights, following, found = lengths / lengths.sum(), at.segment.index + 1, []
        for number, head in enumerate(at.heads):
            means, moment = tensors["mean"][at.layer, number], tensors["moment"][at.layer, number]
            spread = moment - sum(w * torch.outer(m, m) for w, m in zip(weights, means, strict=True))
            logits = torch.stack([key @ means[following] + key @ spread @ key / 2 for key in head.keys])
            received = logits.softmax(0).tolist()
            lengths_of = head.values.norm(dim=1).tolist()
            found.append([(a + epsilon) * length for a, length in zip(received, lengths_of, strict=True)])
        return found

    return score


def forecast(
    tensors: Mapping[str, Tensor], decay: float, surprise: float, memory: float, contrast: float
) -> Scorer:
    """What later maps take from a position, the surprise of its attention, and how far its value is from the mean."""

    def table(name: str, at: Moment, head: int, segment: int) -> Tensor:
        """Values of the positions up to the end of a segment."""
        start = sum(at.spec.ends[:segment])
        return tensors[name][0, at.layer, head, start : start + at.spec.ends[segment]]

    def score(at: Moment) -> Scores:
        now, found = at.segment.index, []
        for number, head in enumerate(at.heads):
            worth = torch.zeros(len(head.tokens)).double()
            for later in range(now, len(at.spec.segments) - 1):  # of the segment after it
                worth += decay ** (later - now) * table("importance", at, number, later)[head.tokens]
            usual = table("received", at, number, now)[head.tokens] + 1e-5
            more = (at.attention(number).mean((0, 1)) + 1e-5).log() - (usual / usual.sum()).log()
            head.numbers = (memory * torch.tensor(head.numbers).double() + more).tolist()
            weights = at.projection.unflatten(1, (HEADS, GROUP, -1))[:, number]
            apart = torch.einsum("wgd,nd->gnw", weights, head.values - head.values.mean(0))
            far = apart.square().sum(-1).mean(0)
            scores = (worth.sqrt() + 1e-5).log() + surprise * torch.tensor(head.numbers).double()
            found.append((scores + contrast / 2 * (far / far.mean() + 1e-5).log()).tolist())
        return found

    return score


def triattention(tensors: Mapping[str, Tensor], horizon: int, recent: int) -> Scorer:
    """Series of distances from calibrated centres plus a product of norms, standardised, the best query head."""

    def score(at: Moment) -> Scores:
        frequencies = BASE ** (-2 * torch.arange(D // 2).double() / D)
        distances = [1 << n for n in range(horizon.bit_length())]
        found = []
        for number, head in enumerate(at.heads):
            keys = torch.view_as_complex(head.keys.unflatten(-1, (-1, 2)).contiguous())
            rows = []
            for g in range(GROUP):
                real, imaginary, modulus = (
                    tensors[name][at.layer, number, g] for name in ("centre_real", "centre_imag", "modulus")
                )
                centre = torch.complex(real, imaginary)
                row = keys.abs() @ (modulus - centre.abs())
                for distance in distances:
                    angle = frequencies * (at.segment.end + distance)
                    turned = centre * torch.polar(torch.ones_like(angle), angle)
                    row = row + (keys.conj() * turned).real.sum(-1) / len(distances)
                rows.append((row - row.mean()) / row.std(correction=0))
            largest = [max(float(row[i]) for row in rows) for i in range(len(keys))]
            found.append(
                [
                    inf if token >= at.segment.end - recent else value
                    for token, value in zip(head.tokens, largest, strict=True)
                ]
            )
        return found

    return score
