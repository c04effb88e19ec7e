"""Causes that multiply a gradient by a number: W, ep or K, and who did it."""

from lightning_moeclip.diagnosis.evidence import Cause, Evidence, World, is_close

__all__ = ["NO_MEND", "scaled_loss", "wrong_count", "wrong_divisor"]

NO_MEND = "No strategy can mend that."


def scaled_loss(ratio: float, world: World) -> Cause:
    """The loss is a multiple of that of one process, and so are the gradients."""
    if is_close(ratio, 1 / world.world_size):
        return Cause(
            "loss_summed",
            f"the loss is 1/{world.world_size} = 1/world_size of that of one process: it sums over the rows, and the "
            f"losses of ranks are averaged. Take the mean over the rows, or multiply by world_size. {NO_MEND}",
            is_in_step=True,
        )
    what = f"{ratio:.6g}" + (" = world_size" if is_close(ratio, world.world_size) else "")
    return Cause(
        "loss_scaled",
        f"the loss is {what} times that of one process: ranks' losses are averaged, so leave out the factor. {NO_MEND}",
        is_in_step=True,
    )


def wrong_divisor(name: str, ratio: float, world: World) -> Cause:
    """The ranks' own gradients are right, and the strategy divides by something else than W."""
    w, ep = world.world_size, world.expert_parallel_size
    is_expert = world.kinds.get(name) == "expert"
    if is_expert and ep > 1 and is_close(ratio, ep):
        also = f" ({ep} is world_size as well: it may not be divided at all)" if ep == w else ""
        text = (
            f"{ep} = expert_parallel_size times too large: averaged over the {w // ep} rank(s) that hold the expert "
            f"instead of divided by world_size={w}{also}"
        )
        return Cause("times_expert_parallel_size", text)
    if is_close(ratio, w):
        return Cause("times_world_size", f"{w} = world_size times too large: summed over the ranks and not divided")
    if is_close(ratio, 1 / w):
        return Cause("over_world_size", f"{w} = world_size times too small: divided twice, or not summed")
    if ep > 1 and is_close(ratio, 1 / ep):
        return Cause("over_expert_parallel_size", f"{ep} = expert_parallel_size times too small: divided once more")
    return Cause("wrong_divisor", f"{ratio:.6g} times too large, though the ranks' own gradients have the right mean")


def wrong_count(evidence: Evidence, ratio: float, world: World) -> Cause | None:
    """The step gives a multiple on every rank, and its loss is right; None for what any wrong number would be."""
    w, k = world.world_size, world.accumulate
    whole = round(ratio)
    if whole >= 2 and is_close(ratio, whole):
        fits = [told for told, n in (("world_size", w), ("accumulate_grad_batches", k)) if n == whole]
        also = f" ({whole} is {' and '.join(fits)})" if fits else ""
        return Cause(
            "counted_times",
            f"the step counts it {whole} times{also}, and its loss is right. {NO_MEND}",
            is_in_step=True,
        )
    if is_close(ratio, 1 / w):
        return Cause(
            "own_rows",
            f"{w} = world_size times too small: the gradient comes through the rank's own features alone, as when they "
            f"are gathered without gradient. Use modules.ContrastiveLoss. {NO_MEND}",
            is_in_step=True,
        )
    if evidence.is_scalar:
        return None
    return Cause("multiple", f"the step gives {ratio:.6g} times the gradient on every rank. {NO_MEND}", is_in_step=True)
