"""Storage in few bits on a GPU that is not there: codes, scales and tables that kernels are given."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbench.core.segments import next_scale
from kvbench.core.storage import StorageConfig
from kvbench.engine import cache as cache_module
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing
from kvbench.engine.packed import storage as packed
from kvbench.engine.schedule import build_schedule
from kvbench.methods.full import Full
from tests.support.engine import prepared
from tests.support.fake_device import CUDA, faked
from tests.support.fake_models import build_spec
