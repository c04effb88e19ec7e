"""Loads Lightning's root of the test that started this process, as ranks of ``on_ranks`` have it too."""

import os
from importlib import import_module

if "TEST_ROOT" in os.environ:
    import_module(os.environ["TEST_ROOT"])
