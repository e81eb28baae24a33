"""Models on images and videos of users. Read in this order:

prepare.py      paths, PIL images, arrays and tensors as the tensors that a model takes
predictor.py    from an image in memory to labels: preprocess, crop, refine, upsample
coco.py         masks in COCO's format
predict.py      `cutslots predict`: images to files
video.py        reading and writing videos, frame by frame
track.py        `cutslots track`: a video to files
"""
