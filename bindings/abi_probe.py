"""Compare the loaded library with what the ctypes layer believes: ``python -m bindings.abi_probe structs|symbols``.

Prints one line and ends with 0 if they agree, 1 if not. It is run in a process of its own, because a library
that does not fit can end the process that loads it.
"""

from __future__ import annotations

import sys


def structs() -> tuple[bool, str]:
    """Compare the sizes of the shim's structs with those of ctypes."""
    from bindings.library import abi_check
    from bindings.wire import wire

    mismatches = abi_check()
    wire()  # raises for its own structs
    return not mismatches, "; ".join(mismatches) or "the structs of the shim and of ctypes have equal sizes"


def symbols() -> tuple[bool, str]:
    """Look for each function that the ctypes layer calls."""
    import llama_cpp

    from bindings import library, nextn, wire

    names = (*library.required_symbols, *wire.required_symbols, *nextn.required_symbols)
    missing = [name for name in names if not hasattr(llama_cpp.llama_cpp._lib, name)]
    return not missing, f"missing: {', '.join(missing)}" if missing else f"all {len(names)} functions are there"


def main() -> int:
    """Run the check that the command line names; return the exit code."""
    try:
        passed, text = {"structs": structs, "symbols": symbols}[sys.argv[1]]()
    except Exception as error:  # the one who asked gets the reason as a line
        passed, text = False, f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{text}\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
