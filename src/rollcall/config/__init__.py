"""The run file: ``sections`` has one pydantic model per section; ``run`` reads and writes the file."""

from rollcall.config.algorithms import (
    Algorithm,
    Cispo,
    Dapo,
    DrGrpo,
    GroupAlgorithm,
    Grpo,
    Gspo,
    Intuitor,
    Ppo,
    ReinforcePlusPlus,
    Rloo,
)
from rollcall.config.base import Section
from rollcall.config.environments import ClassEnvironment, EnvironmentBase, EnvironmentSection, StepEnvironment
from rollcall.config.rewards import (
    CountdownReward,
    ExactReward,
    FunctionReward,
    MathReward,
    NumberReward,
    ReasoningGymReward,
    RegexReward,
    SelfCertaintyReward,
)
from rollcall.config.run import Config, default_run, dump_config, load_config, load_saved_run, parse_config, public_dump
from rollcall.config.sections import (
    SLOT_SYNTAX,
    ClusterSection,
    DataSection,
    EvalSection,
    NodeSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    TrainerSection,
    VllmSection,
    WeightTransport,
)
