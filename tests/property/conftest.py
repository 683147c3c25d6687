"""tinygrad runs $CC for each kernel: choose it as a worker does, before any test imports tinygrad."""

import os

from pptasks.config import Settings
from workers.clang import compiler

os.environ["CC"] = compiler(os.environ, Settings.from_env().cache)
