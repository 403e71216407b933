"""`python -m keras_vit22b.cli`."""

from keras_vit22b.cli.app import main

if __name__ == "__main__":
    main()
