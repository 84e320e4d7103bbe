// Pictures that are attached: files as servers take them, made smaller or of another kind where that is needed.

const TAKEN = ["image/png", "image/jpeg", "image/webp"];
const MOST_BYTES = 3 << 20; // of a file that goes as it is: each turn of a conversation sends its pictures again
const LONGEST_SIDE = 2048; // pixels of one that is drawn anew
const QUALITY = 0.9;

/** Whether a file is a picture. Drawings in SVG are text. */
export const isPicture = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml";

/** The picture as a data: URL. Throws Error where the browser cannot read it. */
export async function pictureUrl(file) {
  if (TAKEN.includes(file.type) && file.size <= MOST_BYTES) return dataUrl(file);
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is a picture that this browser cannot read. PNG, JPEG and WebP are sent as they are.`);
  });
  const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const brush = canvas.getContext("2d");
  brush.fillStyle = "white"; // JPEG knows nothing transparent
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
