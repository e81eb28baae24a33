(value) => ({ ...value, scribbles: value.scribbles.replaceAll(/./g, 0) })
