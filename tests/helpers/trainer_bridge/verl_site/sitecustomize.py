"""Start of the Python processes of a Ray actor in which verl is used: empty missing packages."""

from tests.helpers.trainer_bridge.other_trainers import add_missing_for_verl

add_missing_for_verl()
