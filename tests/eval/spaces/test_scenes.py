"""The scenes feature network that is shipped: how well it reads scenes, and what it was trained on."""

from kvbench.core import checkpoint
from kvbench.eval.networks import to_unit
from kvbench.eval.spaces.scenes import SceneFeatures
from kvbench.extras.training.features import FeatureRecipe, labels, measure
from kvbench.scenes.world import Object, Scene, render
from tests.support.places import ASSETS

ASSET = ASSETS / "infinity_tiny" / "features.safetensors"


def test_shipped_network_reads_new_scenes_and_states_its_recipe() -> None:
    network = SceneFeatures.load(ASSET)
    assert measure(network, 200, seed=123)["scenes"] >= 0.98
    scene = Scene((Object("triangle", "cyan", 40, 50, 20),), "light")
    logits = network(to_unit(render(scene)[None]))[0]
    assert ((logits > 0).numpy() == labels(scene)).all()
    _, metadata = checkpoint.load(ASSET)
    assert FeatureRecipe(**metadata["recipe"]) == FeatureRecipe()
    assert metadata["accuracy"]["scenes"] >= 0.98
