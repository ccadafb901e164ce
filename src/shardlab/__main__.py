"""``shardlab``, ``python -m shardlab``, and what ``torchrun -m shardlab`` runs."""

import sys


def main() -> None:
    """The console script. Ctrl-C may come at any time, also while the commands are imported."""
    try:
        from shardlab import cli

        cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        # `python -m` notes a Ctrl-C that came inside an exec, as of a dataclass, and would end
        # itself by the signal for it, although it was caught. The next exec clears the note.
        exec("")
        if forking := sys.modules.get("shardlab.launch.forking"):
            forking.end_server()


if __name__ == "__main__":
    main()
