(base64) => {
  const href = 'data:application/zip;base64,' + base64;
  if (base64) Object.assign(document.createElement('a'), { href, download: 'masks.zip' }).click();
  return '';
}
