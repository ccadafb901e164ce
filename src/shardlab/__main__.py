"""``python -m shardlab``, which is also what ``torchrun -m shardlab`` runs."""

from shardlab.cli import main

if __name__ == "__main__":
    main()
