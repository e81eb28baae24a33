"""Models that discover objects, and what is done with their outputs.

In reading order:

    discovery            Discovery: images to slots, masks and a reconstruction; the config of a model
    pair_discovery       PairDiscovery: pairs of frames, whose slots are matched
    spacetime_discovery  SpacetimeDiscovery: clips, partitioned by cuts through space and time
    checkpoints          saving and loading; the checkpoints that come with the package (weights/)
    model_card           the model card of a saved model
    training_data        what a checkpoint was trained on, and whether an image resembles it
    graph_ocl            the authors' weights, converted to the preset graph-ocl
    refinement           sharper masks from the decoder's, with similar slots merged
    slot_colors          what refinement does by the colors of slots
    feature_colors       features as colors, for figures
    tracker              slots associated over the frames of a video

Models are registered by name (`cutslots.registry`), as their parts are.
"""
