"""Versions of what the package stands on, against what it was made for.

Nothing here imports Lightning: a compromised release must be told of before it runs.
"""

import platform
from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from lightning_moeclip.diagnosis.findings import Finding

__all__ = ["compromised", "roots_finding", "version_findings"]

_OURS = "lightning-moeclip"
_ROOTS = ("lightning", "pytorch-lightning")
_PACKAGES = ("torch", *_ROOTS, "torchmetrics", "triton", "numpy")
# versions that must not run, however well they fit: what is wrong with them, and what to do
_COMPROMISED = (
    "a compromised release (GHSA-w37p-236h-pfx3), which must not be imported",
    "Renew the credentials that this machine holds, as the advisory says, and install in a new environment: "
    'pip install "lightning>=2.6.4,<2.7".',
)
_KNOWN_BAD = {(name, version): _COMPROMISED for name in _ROOTS for version in ("2.6.2", "2.6.3")}

Installed = Callable[[str], "str | None"]


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compromised(installed: Installed = installed_version) -> list[Finding]:
    """Errors about installed releases that must not be imported."""
    versions = {name: installed(name) for name, _ in _KNOWN_BAD}
    return [_bad(name, version) for name, version in versions.items() if version and (name, version) in _KNOWN_BAD]


def version_findings(
    installed: Installed = installed_version, requirements: list[str] | None = None, python: str = ""
) -> list[Finding]:
    """Findings about each package, those of compromised releases first.

    Args:
        installed: version by the name of a distribution.
        requirements: of this package, as its metadata states them; None reads them.
        python: version of Python; empty takes the one that runs.
    """
    wanted, python_range, problem = _ranges(requirements)
    found = {name: installed(name) for name in _PACKAGES}
    rest = [problem] if problem else []
    rest.append(_in_range("Python", python or platform.python_version(), python_range))
    for name, version in found.items():
        if (name, version) not in _KNOWN_BAD:
            other = next((o for o in _ROOTS if o != name and found[o]), None) if name in _ROOTS else None
            rest.append(_absent(name, other) if version is None else _in_range(name, version, wanted.get(name)))
    return [*compromised(installed), *rest]


def _bad(name: str, version: str) -> Finding:
    told, advice = _KNOWN_BAD[name, version]
    return Finding(name, "error", f"{version} is {told}", advice)


def _ranges(requirements: list[str] | None) -> tuple[dict[str, SpecifierSet], SpecifierSet | None, Finding | None]:
    """Range by package, that of Python, and a finding where they are not to be had."""
    python = None
    if requirements is None:
        try:
            stated = metadata.metadata(_OURS)
        except metadata.PackageNotFoundError:
            advice = "Install it, so that its ranges are known: pip install -e . in its folder."
            return {}, None, Finding(_OURS, "note", "runs from a folder and is not installed", advice)
        requirements = metadata.requires(_OURS) or []
        python = SpecifierSet(stated["Requires-Python"] or "")
    wanted: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, requirements):
        # an optional package counts once it is installed
        wanted[requirement.name] = wanted.get(requirement.name, SpecifierSet()) & requirement.specifier
    if "lightning" in wanted:
        wanted["pytorch-lightning"] = wanted["lightning"]  # one source under two names
    return wanted, python, None


def _in_range(name: str, version: str, wanted: SpecifierSet | None) -> Finding:
    if wanted is None or not str(wanted):
        return Finding(name, "ok", version)
    try:
        fits = wanted.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return Finding(name, "note", f"{version}, which is no version that can be compared with {wanted}")
    if fits:
        return Finding(name, "ok", version)
    advice = (
        f"Use a Python in {wanted}." if name == "Python" else f'Write pip install "{name}{wanted}" in this environment.'
    )
    return Finding(name, "error", f"{version} is out of the range {wanted} that this package is made for", advice)


def _absent(name: str, other: str | None) -> Finding:
    if other is not None:
        return Finding(name, "ok", f"not installed; {other} is, which is all that is needed")
    if name == "triton":
        told = "not installed: torch computes what Triton's kernels would on a GPU"
        return Finding(name, "note", told, 'Write pip install "lightning-moeclip[kernels]" where there are GPUs.')
    return Finding(name, "error", "not installed", f"Write pip install {name}.")


def roots_finding(root: str, installed: Installed = installed_version) -> Finding:
    """Which of Lightning's roots ours are made for, and whether the two are one release.

    Args:
        root: of this process.
        installed: version by the name of a distribution.
    """
    versions = {name: version for name in _ROOTS if (version := installed(name))}
    told = f"ours are made for {root} in this process"
    if len(set(versions.values())) > 1:
        advice = f'Write pip install "pytorch-lightning=={versions["lightning"]}": the two are released together.'
        return Finding("Lightning's roots", "warning", f"{told}, and the two are {versions}", advice)
    return Finding("Lightning's roots", "ok", f"{told}; a program that imports the other one gets that")
