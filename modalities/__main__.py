"""``python -m modalities``."""

from modalities.cli.main import main

if __name__ == "__main__":
    main()
