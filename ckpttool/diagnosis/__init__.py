"""Why a checkpoint does not load into a model, and the commands that fix it."""

from .report import Diagnosis as Diagnosis
from .report import Problem as Problem
from .report import Respec as Respec
from .report import diagnose as diagnose
