"""Models on images and videos of users. Read in this order:

predictor.py    from an image in memory to labels: preprocess, crop, refine, upsample
coco.py         masks in COCO's format
predict.py      `cutslots predict`: images to files
video.py        reading and writing videos, frame by frame
track.py        `cutslots track`: a video to files
"""
