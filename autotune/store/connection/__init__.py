"""Opening databases: URLs, engines, migrations, errors, and servers that do not answer."""
