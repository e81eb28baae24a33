"""Models on images and videos of users. Read in this order:

prepare.py      paths, PIL images, arrays and tensors as the tensors that a model takes
coco.py         masks in COCO's format
prediction.py   Prediction: labels, masks, boxes, scores, overlay and files of one image
outlines.py     outlines of refined masks at the resolution of the image
predictor.py    from an image in memory to a Prediction: preprocess, crop, refine, upsample
predict.py      `cutslots predict`: images to files
video.py        reading and writing videos, frame by frame
tracking.py     from a video to a Prediction for every frame
track.py        `cutslots track`: a video to files
segmentation.py from an image and scribbles to a Segmentation, by minimum cuts
segment.py      `cutslots segment`: the same as files
"""
