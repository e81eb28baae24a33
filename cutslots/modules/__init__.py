"""Networks with one job each: from images to features, from features to slots, from slots back to images.

In reading order:

    base          what parts have in common
    position      position embeddings, and positions of masks
    encoders      images to features: CNN, ResNet, feature pyramid
    patch_vit     a vision transformer that is trained from scratch
    checkpoint_files  config.json and model.safetensors
    backbone      encoders with a checkpoint of their own: pretrained (by `cutslots pretrain`), vit (by transformers)
    partition     features to soft masks by k minimum cuts, or by a softmax alone
    slots         features and masks to slots
    slot_attention  the baseline
    decoders      slots to reconstruction and masks
    feature_decoders  slots to the features of a frozen encoder, and masks
    graph_ocl     partition, slot module and decoder of the authors' released code
    decoder_head  the last layers of a decoder, fused for CUDA (decoder_head_triton: the kernels)

Encoders, partitions, slot modules and decoders are registered by name (`cutslots.registry`).
"""
