"""Where the weights are that a user names; see `covey.runs.weights`."""

from covey.runs.weights import FINAL as FINAL
from covey.runs.weights import model_folder as model_folder
