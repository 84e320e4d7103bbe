// Pictures that are attached: files as servers take them, made smaller or of another kind where that is needed.

// What servers take, and how it begins.
const TAKEN = { "image/png": /^\x89PNG/, "image/jpeg": /^\xff\xd8\xff/, "image/webp": /^RIFF.{4}WEBP/s };
const MOST_BYTES = 3 << 20; // of a file that goes as it is: each turn of a conversation sends its pictures again
const LONGEST_SIDE = 2048; // pixels of one that is drawn anew
const QUALITY = 0.9;

/** Whether a file is a picture. Drawings in SVG are text. */
export const isPicture = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml";

/** The picture as a data: URL. Throws Error where the browser cannot read it. */
export async function pictureUrl(file) {
  const kind = await kindOf(file);
  if (kind in TAKEN && file.size <= MOST_BYTES) return dataUrl(new Blob([file], { type: kind }));
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

/** What a file is by its content, where that is known. Browsers say what its name says, and servers refuse a wrong type. */
async function kindOf(file) {
  const start = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  return Object.keys(TAKEN).find((kind) => TAKEN[kind].test(start)) ?? file.type;
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
