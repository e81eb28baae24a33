"""Training runs: from a config to a run folder with checkpoints, metrics and a report.

In reading order:

    config       TrainConfig, every option of a run
    presets      named configs
    losses       what is minimised
    schedules    learning rate and texture strength by step
    data         the datasets of a run
    teacher      labels of a teacher, for self-training
    loader       the images of each step
    loop         the training loop
    augment      random changes of images
    objectives, pretrain    the same loop trains encoders without labels (pretrain_presets: named configs)
    run_folder   claiming and resuming a run folder; the training state
    logger       metrics, progress, checkpoints (tensorboard: curves; report: the page)
"""
