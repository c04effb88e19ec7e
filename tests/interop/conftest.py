"""Warnings of other libraries are theirs; ours stay errors."""

import pytest

# each line names the package that is expected to mend it
OTHERS = [
    "ignore::DeprecationWarning:deepspeed",
    "ignore::FutureWarning:deepspeed",
    "ignore::UserWarning:deepspeed",
    "ignore::DeprecationWarning:open_clip",
    "ignore::FutureWarning:timm",
    "ignore::UserWarning:timm",
]


def pytest_configure(config: pytest.Config) -> None:
    for line in OTHERS:
        config.addinivalue_line("filterwarnings", line)
