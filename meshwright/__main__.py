"""python -m meshwright."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
