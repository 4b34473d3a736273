"""How far a run has got: the one place where steps, tokens and samples are counted."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, order=True)
class TrainingProgress:
    """Counters over the whole history of a run, all global (over all ranks), and its target.

    Args:
        num_seen_steps: Optimizer steps done.
        num_seen_tokens: Tokens trained on.
        num_target_steps: Optimizer steps at which the run ends.
        num_target_tokens: Tokens at which the run ends.
        num_seen_samples: Sequences trained on; the position in the global order of the data.
    """

    num_seen_steps: int
    num_seen_tokens: int
    num_target_steps: int
    num_target_tokens: int
    num_seen_samples: int = 0

    def after_step(self, num_samples: int, num_tokens: int) -> TrainingProgress:
        """The progress one optimizer step later.

        Args:
            num_samples: Sequences of the step, over all ranks.
            num_tokens: Tokens of the step, over all ranks.
        """
        return replace(
            self,
            num_seen_steps=self.num_seen_steps + 1,
            num_seen_tokens=self.num_seen_tokens + num_tokens,
            num_seen_samples=self.num_seen_samples + num_samples,
        )

    @property
    def is_finished(self) -> bool:
        return self.num_seen_steps >= self.num_target_steps
