"""Watch this process: Python imports this module when it starts, if the folder is on the path of imports."""

from helpers.watched import watch_from_start

watch_from_start()
