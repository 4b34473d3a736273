"""Door sign of ``optim/``: optimizers and learning-rate schedulers."""

from typing import Annotated

from pydantic import Field

from modalities.optim.rules import has_a_length, one_implementation, warmup_fits
from modalities.optim.settings import AnnealStrategy
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, Instance, NamesOf
from modalities.registry.interfaces import LRScheduler, Model, Optimizer
from modalities.registry.rules import Rule
from modalities.registry.spec import Sign

sign = Sign()

Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]
Momentum = Annotated[float, Field(gt=0, lt=1)]


class AdamFields(ComponentConfig):
    """Fields that both Adam variants have."""

    lr: float = Field(ge=0, description="learning rate; a scheduler takes it as its base")
    wrapped_model: Annotated[Instance[Model] | list[Instance[Model]], places.TRAINED_MODEL] = Field(
        description="the model, sharded and initialised"
    )
    betas: tuple[Beta, Beta] = Field(description="decay of the running means of gradient and squared gradient")
    eps: float = Field(gt=0, description="added to the root of the squared gradient")
    weight_decay: float = Field(ge=0, description="strength of the decay")
    weight_decay_groups_excluded: Annotated[list[str], NamesOf("weight_decay_groups", of="wrapped_model")] = Field(
        description="groups of the model's parameters without decay"
    )
    foreach: bool | None = Field(None, description="update all parameters of a group in few calls")
    fused: bool | None = Field(None, description="update in one kernel; by default where the device can")

    rules = (Rule(("foreach", "fused"), one_implementation),)


@sign.component("optimizer", "adam", builds="modalities.optim.optimizers:make_adam", provides=Optimizer)
class AdamConfig(AdamFields):
    """Adam; weight decay is added to the gradient."""


@sign.component("optimizer", "adam_w", builds="modalities.optim.optimizers:make_adam_w", provides=Optimizer)
class AdamWConfig(AdamFields):
    """AdamW: Adam with weight decay apart from the gradient."""


class SchedulerFields(ComponentConfig):
    """Fields that all schedulers have."""

    optimizer: Annotated[Instance[Optimizer], DefaultFrom("optimizer")] = Field(
        description="whose learning rate is set"
    )


class ResumableSchedulerFields(SchedulerFields):
    """Fields of schedulers that can start in the middle."""

    last_epoch: int = Field(-1, ge=-1, description="last step done; -1 for a fresh start or a state to be loaded")


@sign.component("scheduler", "dummy_lr", builds="modalities.optim.schedulers:DummyLR", provides=LRScheduler)
class DummyLRConfig(SchedulerFields):
    """The optimizer's learning rate throughout."""


@sign.component("scheduler", "step_lr", builds="modalities.optim.schedulers:StepLR", provides=LRScheduler)
class StepLRConfig(ResumableSchedulerFields):
    """The rate is multiplied by gamma every step_size steps."""

    step_size: int = Field(gt=0, description="steps between two changes")
    gamma: float = Field(ge=0, description="factor of each change")


@sign.component("scheduler", "constant_lr", builds="modalities.optim.schedulers:ConstantLR", provides=LRScheduler)
class ConstantLRConfig(ResumableSchedulerFields):
    """A fraction of the rate for the first total_iters steps, then all of it."""

    factor: float = Field(ge=0, le=1, description="the fraction")
    total_iters: int = Field(gt=0, description="steps with the fraction")


@sign.component("scheduler", "linear_lr", builds="modalities.optim.schedulers:LinearLR", provides=LRScheduler)
class LinearLRConfig(ResumableSchedulerFields):
    """The rate times a factor that goes linearly from start_factor to end_factor."""

    start_factor: float = Field(gt=0, le=1, description="factor at step 0")
    end_factor: float = Field(ge=0, le=1, description="factor from step total_iters on")
    total_iters: int = Field(gt=0, description="steps from one to the other")


@sign.component("scheduler", "onecycle_lr", builds="modalities.optim.schedulers:OneCycleLR", provides=LRScheduler)
class OneCycleLRConfig(ResumableSchedulerFields):
    """One rise and one fall (https://arxiv.org/abs/1708.07120)."""

    max_lr: Rate | list[Rate] = Field(description="highest rate, one or one for each parameter group")
    total_steps: int | None = Field(None, gt=0, description="steps of the cycle; else epochs * steps_per_epoch")
    epochs: int | None = Field(None, gt=0, description="number of epochs, without total_steps")
    steps_per_epoch: int | None = Field(None, gt=0, description="steps of an epoch, without total_steps")
    pct_start: float = Field(gt=0, le=1, description="share of the steps that rise")
    anneal_strategy: EnumField[AnnealStrategy] = Field(description="shape of rise and fall: cos or linear")
    cycle_momentum: bool = Field(False, description="move beta1 the other way")
    base_momentum: Momentum | list[Momentum] = Field(0.85, description="lowest momentum")
    max_momentum: Momentum | list[Momentum] = Field(0.95, description="highest momentum")
    div_factor: float = Field(gt=0, description="max_lr / first rate")
    final_div_factor: float = Field(gt=0, description="first rate / last rate")
    three_phase: bool = Field(False, description="fall to the first rate before falling to the last")

    rules = (Rule(("total_steps?", "epochs?", "steps_per_epoch?"), has_a_length),)


@sign.component(
    "scheduler", "cosine_annealing_lr", builds="modalities.optim.schedulers:CosineAnnealingLR", provides=LRScheduler
)
class CosineAnnealingLRConfig(ResumableSchedulerFields):
    """From the optimizer's rate to eta_min along half a cosine, and back again."""

    t_max: Annotated[int, places.NUM_TARGET_STEPS] = Field(gt=0, description="steps down to eta_min")
    eta_min: float = Field(ge=0, description="lowest rate")


@sign.component(
    "scheduler",
    "linear_warmup_cosine_annealing_lr",
    builds="modalities.optim.schedulers:LinearWarmupCosineAnnealingLR",
    provides=LRScheduler,
)
class LinearWarmupCosineAnnealingLRConfig(ResumableSchedulerFields):
    """Linearly up to max_lr, then along half a cosine to final_lr, where it stays."""

    warmup_steps: int = Field(ge=0, description="steps up to max_lr")
    total_steps: Annotated[int, places.NUM_TARGET_STEPS] = Field(
        gt=0, description="steps down to final_lr, warm-up included"
    )
    initial_lr: float = Field(ge=0, description="rate at step 0")
    final_lr: float = Field(ge=0, description="rate from step total_steps on")
    max_lr: Annotated[float, DefaultFrom("optimizer.lr")] = Field(ge=0, description="highest rate")

    rules = (Rule(("warmup_steps", "total_steps"), warmup_fits),)
