// Shows the image of the dot of the embedding map under the pointer, or that the arrow keys have chosen.
"use strict";
{
  const chart = document.querySelector("#embedding");
  const picture = chart.querySelector("#near img");
  const caption = chart.querySelector("#near figcaption");
  const dots = [...chart.querySelectorAll("svg .dot")].slice(0, pictures.length); // those of the legend follow
  let chosen = -1;

  const show = (number) => {
    dots[chosen]?.classList.remove("chosen");
    chosen = number;
    dots[chosen].classList.add("chosen");
    picture.src = "data:image/jpeg;base64," + pictures[chosen];
    picture.hidden = false;
    picture.alt = caption.textContent = names[chosen];
  };

  dots.forEach((dot, number) => dot.addEventListener("pointerenter", () => show(number)));
  chart.querySelector("#dots").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      event.preventDefault();
      show((chosen + step + dots.length) % dots.length);
    }
  });
}
