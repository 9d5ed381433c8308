"""Read by pytest before the tests here: nothing is asked for over the network, whichever of them run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
