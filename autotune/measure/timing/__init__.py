"""When and how a device is timed: alone, with cold caches, contenders in turn."""
