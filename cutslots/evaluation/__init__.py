"""How well a model finds objects: metrics, evaluation of checkpoints, visualizations and report pages.

Read in this order:

    metrics.py      ARI, mIoU, mBO, CorLoc, MSE and ID switches of label maps; MetricRows, which collects them
    tracking.py     HOTA and IDF1 of mask tracks
    objects.py      objects found, by size and by occlusion
    labels.py       the kinds of masks that are evaluated, and their label maps
    counting.py     contingency tables of a batch, counted on the device
    batches.py      the batches of an evaluation: reading, counting, metrics
    evaluate.py     evaluate_model: metrics of every image of a dataset; evaluate: the command
    probes.py       probes of slots for the properties of objects
    visualize.py    images, masks and slots as arrays to show
    gallery.py      the worst and the first images of an evaluation, for its report
    published.py    results that the paper reports
    tables.py       metrics as tables, for a terminal and for a page
    report.py       sections of report pages, and the page of an evaluation
"""
