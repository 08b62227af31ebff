from baton import plan as plan
from baton import sft as sft
from baton import simulate as simulate
from baton.api import Callback as Callback
from baton.api import Run as Run
from baton.api import TrainableRecipe
from baton.api import evaluate as evaluate
from baton.api import preview as preview
from baton.api import train as train
from baton.errors import UserError as UserError
from baton.records.evaluation import Evaluation as Evaluation
from baton.run.trajectories import Sample as Sample

__version__: str
Recipe = TrainableRecipe
